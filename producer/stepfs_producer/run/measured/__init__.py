"""What a running plan measures of itself: `work`, which says where workers go, and `bottleneck`, which it shows."""
