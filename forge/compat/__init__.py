"""Private parts of other libraries that forge uses; if one disappears, its test says what to do.

One module per library. Each function imports its library itself, so importing the module is cheap.
"""
