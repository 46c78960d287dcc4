"""The command `python -m flash_attn3.explain`: flash_attn3/tools/explain.py."""
from flash_attn3.tools.explain import main

if __name__ == '__main__':
    main()
