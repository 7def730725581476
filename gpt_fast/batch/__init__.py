"""Bulk work: a file of requests in, a file of answers out, in their order; what is interrupted goes on where it was."""
