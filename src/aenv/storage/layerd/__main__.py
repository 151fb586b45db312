"""``aenv-layerd``: the layer server. Without arguments it runs by the node's configuration, in the foreground.

``aenv-layerd keep JSON`` is how a node starts it; ``serve`` and ``adopt`` are how its two processes start each other.
"""

import sys
from typing import TYPE_CHECKING

from aenv.errors import AenvError
from aenv.log import configure
from aenv.storage.layerd import keeper
from aenv.storage.layerd.config import Config
from aenv.storage.layerd.handoff import MODULE, Handoff

if TYPE_CHECKING:
    from aenv.storage.fetching import FetchPolicy
    from aenv.storage.layerd.opening import Opener


def main(module: str = MODULE, opener: "Opener | None" = None, policy: "FetchPolicy | None" = None) -> None:
    """``module`` is run for the other process; ``opener`` finds layers, by default in exports' repositories."""
    configure("info", "auto")
    try:
        match sys.argv[1:]:
            case ["serve", handoff]:
                from aenv.storage.layerd.service import serve  # the keeper needs none of this

                serve(Handoff.load(handoff), opener, policy)
            case ["adopt", handoff, server]:
                keeper.adopt(Handoff.load(handoff), int(server))
            case ["keep", config]:
                keeper.start(Config.load(config), module)
            case []:
                from aenv.storage.layerd.settings import from_settings

                keeper.start(from_settings(), module)
            case _:
                sys.exit((__doc__ or "").strip())
    except AenvError as error:
        sys.exit(f"aenv-layerd: {error}")


if __name__ == "__main__":
    main()
