"""How the command line reports errors: in one sentence, once for all processes of a run."""

from __future__ import annotations

import traceback
from typing import Any

import typer
from typer.core import TyperGroup

from trlx_like.errors import TrlxError
from trlx_like.meeting import first_to_say
from trlx_like.redact import redacted


class Commands(TyperGroup):
    """Commands that report a user's error in one sentence, and accept `--traceback` anywhere in the line."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        switch = ["--traceback"] if "--traceback" in args else []
        return super().parse_args(ctx, [*switch, *(word for word in args if word not in switch)])

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except TrlxError as error:
            if ctx.params["traceback"]:
                typer.echo(redacted("".join(traceback.format_exception(error))), err=True)
            elif first_to_say(str(error)):
                typer.echo(str(error), err=True)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except Exception as error:
            if not first_to_say(repr(error)):  # another process shows the traceback
                raise typer.Exit(1) from None
            raise
