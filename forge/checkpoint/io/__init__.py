"""Host memory for copies, and files that several threads write and checksum."""
