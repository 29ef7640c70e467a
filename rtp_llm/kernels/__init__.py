"""Operations that layers call, the back ends that compute them, and the choice between back ends."""
