"""A small model to train with two implementations of attention."""
import torch


def losses_of(attention, device, steps, length):
    """Training of a model with two layers of causal attention to predict the token before last."""
    torch.manual_seed(1)
    d, heads, tokens = 128, 2, 16
    embed = torch.nn.Embedding(tokens, d)
    layers = [torch.nn.ModuleDict({"qkv": torch.nn.Linear(d, 3 * d), "out": torch.nn.Linear(d, d),
                                   "norm": torch.nn.LayerNorm(d)}) for _ in range(2)]
    head = torch.nn.Linear(d, tokens)
    parts = torch.nn.ModuleList([embed, *layers, head]).to(device)
    optimiser = torch.optim.Adam(parts.parameters(), 3e-3)
    losses = []
    for _ in range(steps):
        x = torch.randint(tokens, (2, length)).to(device)
        h = embed(x)
        for layer in layers:
            qkv = layer["qkv"](layer["norm"](h)).bfloat16().unflatten(2, (3, heads, d // heads))
            o = attention(*(t.transpose(1, 2) for t in qkv.unbind(2)))
            h = h + layer["out"](o.transpose(1, 2).flatten(2).float())
        loss = torch.nn.functional.cross_entropy(head(h)[:, 2:].flatten(0, 1), x[:, :-2].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return torch.tensor(losses)
