"""Private parts of other libraries, each with a contract test that says what to do if it goes.

One module a library, which imports it where a function needs it: to import a module costs nothing.
"""
