"""The command line: one short file per verb. Nothing heavy is imported before a verb runs."""


def main() -> None:
    from courtside.cli.app import app

    app(prog_name="courtside")
