"""The node half of CSI v1: volumes of Kubernetes that are mounts. `python -m stepfs.csi plugin`, and `… holder`."""
