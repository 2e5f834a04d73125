"""A program whose model and checkpoint are sharded: FSDP2 and torch.distributed.checkpoint on gloo."""

FSDP = """
    import os, sys, torch, rubberband
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=float(sys.argv[2]) if sys.argv[2:] else 0.02)
    begin, path = 0, os.path.join(sys.argv[1], "state")
    if os.path.exists(path):
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "epoch": 0}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        begin = state["epoch"]
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1), dtype=torch.double)
    y = x.sum(1, keepdim=True).sin()
    for epoch in range(begin + 1, 9):
        for batch in torch.arange(64).split(16):
            mine = batch[rank::size]
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x[mine]), y[mine]).backward()
            optimizer.step()
        with torch.no_grad():
            loss = torch.nn.functional.mse_loss(model(x), y).item()
        weights, moments = get_state_dict(model, optimizer)
        writer = dcp.FileSystemWriter(path, overwrite=True)
        dcp.save({"model": weights, "optimizer": moments, "epoch": epoch}, storage_writer=writer)
        rubberband.report({"loss": loss})
"""
"""Every rank writes its part of the state."""
