"""Container images as root file systems: references, registries, blobs, layers, ext4."""
