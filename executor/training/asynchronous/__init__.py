"""Asynchronous training: workers exchange gradients and parameters with parameter servers (Lin et al., §2).

`runner.py` is the training loop of a worker, `servers.py` its end of the connections, `server.py` a parameter server,
`pacing.py` what the first server decides for all workers, `shards.py` which server holds which tensors.
"""
