"""The backend that trains on Ray: `backend` carries out the controller's commands on the instances of a provider.

`fleet` rents, watches and releases instances, `workers` keeps a warm worker on each of their slots (`slot_worker` is
its process, `fork_server` starts it fast where a fork is safe), `attempt` follows one trial's segment,
`connection` reaches the cluster and the instances, `code` takes the user's code there. The pool's broker uses the same
parts (`rubberband/running`).
"""
