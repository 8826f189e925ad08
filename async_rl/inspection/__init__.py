"""What a person sees of trajectories: of a run (`browse`), and of a loop being tried out (`try_out`)."""
