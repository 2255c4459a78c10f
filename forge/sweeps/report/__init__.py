"""`forge report`: a sweep as one HTML file that opens offline"""
