"""The command `python -m flash_attn3.doctor`: flash_attn3/tools/doctor.py."""
import sys

from flash_attn3.tools.doctor import main

if __name__ == '__main__':
    sys.exit(main())
