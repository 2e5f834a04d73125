"""Do: carries a plan out as a journalled state machine, on Ray or on a virtual clock."""
