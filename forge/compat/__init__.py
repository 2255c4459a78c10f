"""Private parts of other libraries that forge uses; a test of each fails if that part changes.

One module per library. Each function imports its library itself, so importing the module is cheap.
"""
