"""A load client for streaming completion servers, timed at the socket. It needs no torch.

    options.py    one load level: which endpoint, which requests, when
    prompts.py    what to ask: a file's prompts, or token ids drawn at random
    wire.py       how to ask and how to read the pieces of an answer: native, OpenAI completions, OpenAI chat
    http.py       bytes to pieces of body, by httptools
    connection.py sockets: one callback per read, no task switch per chunk
    client.py     when to ask: arrivals, concurrency, hanging up; one record per request
    metrics.py    records to numbers, under the names of `vllm bench serve`

It is not a general HTTP client: no redirects, no proxies, no compression, no retries.
"""
