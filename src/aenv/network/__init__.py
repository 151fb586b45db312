"""Network slots: one namespace, tap and egress policy per sandbox. See docs/internals/network.md."""
