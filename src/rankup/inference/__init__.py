"""Answering for others: a queue that batches requests, a server and its page."""
