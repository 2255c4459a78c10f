"""Why a job stopped, waits, restarts or saved nothing: the cause, the evidence, and what helps"""
