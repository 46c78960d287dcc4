"""Masks as the host module takes them, and what they mean, pair by pair."""
from hypothesis import strategies as st

FULL, CAUSAL = (0, -1, -1, 0), (1, -1, -1, 0)
NAMES = {'full': 0, 'causal': 1, 'general': 2, 'softcap': 3}

# (kind, left, right, chunk): -1 no limit, chunk 0 none.
GENERAL = [(2, -1, -1, 0), (2, -1, 0, 0), (2, 0, 0, 0), (2, 37, 0, 0), (2, 100, 5, 0),
           (2, -1, 70, 0), (2, 64, -1, 0), (2, -1, 0, 48), (2, -1, -1, 100), (2, 30, 200, 128)]
MASKS = [FULL, CAUSAL, *GENERAL]

sides = st.one_of(st.just(-1), st.integers(0, 300))
general = st.tuples(st.just(2), sides, sides, st.one_of(st.just(0), st.integers(1, 300)))
any_mask = st.one_of(st.just(FULL), st.just(CAUSAL), general)


def mask_of_kind(kind: str):
    """Those of a variant."""
    with_softcap = general.map(lambda mask: (NAMES['softcap'], *mask[1:]))
    return {'full': st.just(FULL), 'causal': st.just(CAUSAL), 'general': general,
            'softcap': with_softcap}[kind]


def sees(query, key, seqlen_q, seqlen_k, mask):
    """The definition: a query's own key is aligned bottom-right; chunks start at key 0, and hold no
    query before it.
    """
    kind, left, right, chunk = mask
    own = query + seqlen_k - seqlen_q
    if not 0 <= key < seqlen_k or not 0 <= query < seqlen_q:
        return False
    if kind == 0:
        return True
    if kind == 1:
        return key <= own
    in_window = (left < 0 or key >= own - left) and (right < 0 or key <= own + right)
    return in_window and (chunk == 0 or own >= 0 and key // chunk == own // chunk)
