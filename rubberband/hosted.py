"""The process of an experiment that the service started: `python -m rubberband.hosted HOME NAME`.

It runs or resumes what `order.json` of the experiment's folder says, as `rubberband run` would, and needs no server:
one that is restarted finds it by its lock.
"""
