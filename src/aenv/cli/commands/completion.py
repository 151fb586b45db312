"""``aenv completion``."""

from typing import Annotated

import typer

from aenv.cli.help import application, command
from aenv.errors import AenvError

app = application()

SHELLS = ("bash", "zsh", "fish")


@command(
    app,
    "completion",
    """
eval "$(aenv completion bash)"       # in ~/.bashrc
eval "$(aenv completion zsh)"        # in ~/.zshrc, after compinit
aenv completion fish > ~/.config/fish/completions/aenv.fish
""",
)
def completion(
    shell: Annotated[str, typer.Argument(help="bash, zsh or fish.", show_default=False)],
) -> None:
    """Print the completion script of a shell. It completes commands, options, and ids of sandboxes."""
    if shell not in SHELLS:
        raise AenvError(f"There is no completion for {shell!r}.", "There is for bash, zsh and fish.")
    from typer._completion_shared import get_completion_script

    print(get_completion_script(prog_name="aenv", complete_var="_AENV_COMPLETE", shell=shell))
