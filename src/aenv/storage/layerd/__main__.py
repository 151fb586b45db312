"""``aenv-layerd``: the layer server. Without arguments it runs by the node's configuration, in the foreground.

``aenv-layerd keep JSON`` is how a node starts it, ``adopt`` how a server starts another keeper.
"""

import sys

from aenv.errors import AenvError
from aenv.log import configure
from aenv.storage.fetching import FetchPolicy
from aenv.storage.layerd import keeper
from aenv.storage.layerd.config import Config
from aenv.storage.layerd.handoff import MODULE, Handoff
from aenv.storage.layerd.opening import Opener
from aenv.storage.layerd.service import serve


def main(module: str = MODULE, opener: Opener | None = None, policy: FetchPolicy | None = None) -> None:
    """``module`` is run for another keeper; ``opener`` finds layers, by default in exports' repositories."""
    configure("info", "auto")

    def run(handoff: Handoff) -> None:
        serve(handoff, opener, policy)

    try:
        match sys.argv[1:]:
            case ["adopt", handoff, server]:
                keeper.adopt(Handoff.load(handoff), int(server), run)
            case ["keep", config]:
                keeper.start(Config.load(config), module, run)
            case []:
                from aenv.storage.layerd.settings import from_settings

                keeper.start(from_settings(), module, run)
            case _:
                sys.exit((__doc__ or "").strip())
    except AenvError as error:
        sys.exit(f"aenv-layerd: {error}")


if __name__ == "__main__":
    main()
