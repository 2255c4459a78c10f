"""One reader of a sweep's directory: its jobs, attempts, metrics, and the reasons of their ends"""
