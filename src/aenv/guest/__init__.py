"""The guest's side of a sandbox: kernel, initramfs, base root filesystem and the envd protocol."""
