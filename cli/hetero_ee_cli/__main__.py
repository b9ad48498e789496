"""Where the process begins: `hetero-ee`, and `python -m hetero_ee_cli`."""

from hetero_ee_cli.terminal.signals import ending_at_once


def main() -> None:
    """Entry point of the `hetero-ee` script."""
    with ending_at_once():  # Ctrl-C while the command line itself is imported
        from hetero_ee_cli.app import main as run
    run()


if __name__ == "__main__":
    main()
