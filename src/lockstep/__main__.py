"""`python -m lockstep`, the form that torchrun's `-m` needs."""

from lockstep.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
