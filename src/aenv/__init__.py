"""AgentENV: isolated Linux computers (microVMs) for AI agents."""

__version__ = "0.1.0"
