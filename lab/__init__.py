"""The lab: one virtual machine with a working ``/dev/kvm`` and ``/dev/ublk-control``, on machines that have neither.

QEMU's software emulation runs a Debian whose processor has AMD's virtualization. Everything in it is 10 to 50 times
slower than on real hardware, and real. ``docs/internals/lab.md`` says how it is made.
"""
