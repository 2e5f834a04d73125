"""Training code of other libraries as trials: PyTorch Lightning, the Trainer of Hugging Face, functions of Ray Tune.

Each module is imported by its own name; none of them imports the library before it is used.
"""
