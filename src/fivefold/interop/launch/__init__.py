"""Launch files: torchrun scripts, Slurm batch scripts and Kubernetes manifests, for any Python program."""
