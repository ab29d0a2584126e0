"""What `scripts/image` does: the image of scripts/deploy/Dockerfile, built with chroot in place of docker."""
