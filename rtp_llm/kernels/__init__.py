"""Operations that layers call: what they compute, who can compute them here, and the choice between those."""
