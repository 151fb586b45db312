"""Logging of the programs: structlog, readable on a terminal and JSON elsewhere."""

import logging
import sys
from typing import TextIO

import structlog


def configure(level: str, style: str, stream: TextIO = sys.stderr) -> None:
    """Send all logs of the process to ``stream``. ``style`` is console, json, or auto (by terminal)."""
    console = style == "console" or (style == "auto" and stream.isatty())
    shared: list[structlog.types.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    renderer: structlog.types.Processor
    if console:
        renderer = structlog.dev.ConsoleRenderer(colors=stream.isatty())
    else:
        renderer = structlog.processors.JSONRenderer()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                renderer,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    # The level is about the platform's own words; libraries speak up from INFO, or higher if asked to be quiet.
    logging.getLogger("aenv").setLevel(level.upper())
    root.setLevel(max(logging.INFO, logging.getLevelNamesMapping()[level.upper()]))
