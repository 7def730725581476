"""Parts of compare_peers.py: one module per peer, each a worker process, and what starts them, feeds them and reports.

worker.py      the worker's side of the protocol: commands on stdin, one JSON line each on stdout; standard library only
process.py     the other side
registry.py    the peers by name: formats, installation, module
ours.py, llamacpp.py, ikllama.py, openvino.py, eager.py, gptfast.py     the workers; each imports only its own engine
contexts.py    what llamacpp.py and ikllama.py (with ik_shim.c) share: runs, and the choice of the fastest way
files.py       checkpoints of random weights, GGUF files and OpenVINO's models from them, all kept
measures.py    what is measured; standard library only
rounds.py      loading and alternating
report.py      medians, ratios, table; reading what was measured before
plots.py       bars of every measure, or lines against rows, contexts or threads
"""
