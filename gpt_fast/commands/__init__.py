"""The commands of ``gpt-fast``, one file each: ``add_parser(subparsers)`` declares it, ``run(arguments)`` does it.
torch is imported inside ``run``, so that ``--help`` and wrong flags answer at once."""
