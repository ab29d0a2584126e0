"""scripts/csi_sanity: other people's test of CSI drivers, on ours."""
