"""Asynchronous training: workers exchange gradients and parameters with parameter servers (Lin et al., §2).

`runner.py` is the training loop of a worker, `servers.py` its end of the connections, `server.py` a parameter server.
`protocol.py` has their messages, and says in which order workers train and updates are applied; `shards.py` says which
server holds which tensors, and how it applies updates to them.
"""
