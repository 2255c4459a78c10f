"""What a sweep's directory says: its jobs, their attempts and metrics, and why each one ended"""
