"""Private parts of other libraries; a contract test for each says what to do if it disappears.

One module per library. Each function imports its library itself, so importing the module is cheap.
"""
