"""Memory for copies, and a file that several threads write and checksum."""
