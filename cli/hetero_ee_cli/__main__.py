"""`python -m hetero_ee_cli` is `hetero-ee`."""

from hetero_ee_cli.app import main

main()
