"""Upstream's module name. It lists what a build omits; ours omits only GPUs before Hopper."""
CONFIG = {'build_flags': {
    **{f'FLASHATTENTION_DISABLE_{name}': False for name in (
        'BACKWARD', 'SPLIT', 'PAGEDKV', 'APPENDKV', 'LOCAL', 'SOFTCAP', 'PACKGQA', 'FP16', 'FP8',
        'VARLEN', 'CLUSTER', 'HDIM64', 'HDIM96', 'HDIM128', 'HDIM192', 'HDIM256', 'HDIMDIFF64',
        'HDIMDIFF192')},
    'FLASHATTENTION_DISABLE_SM8x': True,
    'FLASHATTENTION_ENABLE_VCOLMAJOR': False,
}}


def show() -> None:
    """Prints CONFIG."""
    print(CONFIG)
