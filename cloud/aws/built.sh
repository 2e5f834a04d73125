# In place of what boot.sh has, on an instance whose image has the environment already.

make_venv() { # the image has everything but the driver's own package of now, which changes more often
    local address
    export UV_CACHE_DIR="$DIR/cache" UV_PYTHON_INSTALL_DIR="$DIR/python" UV_HTTP_RETRIES=10
    export VIRTUAL_ENV="$DIR/venv" PATH="$DIR/venv/bin:$DIR/uv/bin:$PATH"
    cd "$DIR"
    for address in "${WHEELS[@]}"; do
        say "fetching $address"
        fetch "$address" wheels
    done
    say "updating the environment of the image"
    uv pip install --quiet --no-deps "${REQUIREMENTS[@]}"
}
