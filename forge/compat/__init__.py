"""Private parts of other libraries; a contract test for each says what to do if it disappears.

One module a library, which imports it where a function needs it: to import a module costs nothing.
"""
