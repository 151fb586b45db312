"""The layer server: a read-only FUSE mount whose files are composed virtual disks and memories."""
