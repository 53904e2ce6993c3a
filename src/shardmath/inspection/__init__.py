"""Where is every rank of a job, and who is missing?"""
