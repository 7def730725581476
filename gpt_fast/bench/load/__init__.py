"""A load client for streaming completion servers, timed at the socket. It needs no torch.

It is not a general HTTP client: no redirects, no proxies, no compression, no retries.
"""
