# What the boot scripts of workers and of the head share. The values in capitals are set by who makes the script.

say() {
    echo "rubberband: $(date -u +%H:%M:%S) $*"
}

find_uv() {
    command -v uv > /dev/null && return
    say "installing uv"
    local has_pip=1 quietly=(--quiet --no-input --disable-pip-version-check --target "$DIR/uv")
    python3 -m pip --version > /dev/null 2>&1 || has_pip=
    if [[ -n "$INDEX_URL" && -n "$has_pip" ]]; then
        python3 -m pip install "${quietly[@]}" uv
    elif [[ -n "$INDEX_URL" ]]; then
        fetch_uv "$INDEX_URL" "$DIR/uv/bin" "$UV_VERSION" "${UV_SHA256[@]}"
    else
        [[ -n "$has_pip" ]] || install_pip
        echo "uv==$UV_VERSION ${UV_SHA256[*]/#/--hash=sha256:}" > "$DIR/uv.txt"
        python3 -m pip install "${quietly[@]}" --no-deps --only-binary=:all: --require-hashes -r "$DIR/uv.txt"
    fi
}

install_pip() { # the image's Python has none, as Canonical's
    say "installing pip"
    if command -v apt-get > /dev/null; then
        apt-get -qq -o DPkg::Lock::Timeout=300 update
        DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 install --no-install-recommends python3-pip
    else
        dnf -q -y install python3-pip
    fi
}

fetch_uv() { # of a version, from an index (PEP 503), into a folder; it must have one of the digests
    local index="${1%/}/uv/" folder="$2" version="$3" link found get=(curl --fail --silent --show-error --location --netrc-optional --retry 5)
    [[ "$index" != file://* ]] || index+=index.html
    link="$("${get[@]}" "$index" | grep -om1 "[^\"'<> ]*uv-$version-py3-none-manylinux_2_17_$(uname -m)[^\"'<>#]*\.whl" | head -1)"
    mkdir -p "$folder"
    "${get[@]}" --output "$folder/uv.whl" \
        "$(python3 -c 'import sys, urllib.parse; print(urllib.parse.urljoin(*sys.argv[1:]))' "$index" "${link:?there is no uv $version}")"
    found="$(sha256sum < "$folder/uv.whl")"
    if [[ " ${*:4} " != *" ${found%% *} "* ]]; then
        say "uv $version of $index has another sha256 than rubberband knows: ${found%% *}"
        return 1
    fi
    python3 -m zipfile -e "$folder/uv.whl" "$folder/wheel"
    mv "$folder/wheel/uv-$version.data/scripts/uv" "$folder"
    chmod +x "$folder/uv"
}

fetch() { # what lies at an s3:// address, into a folder, with the instance's role; it must have the digest behind the #
    python3 -c 'import boto3, hashlib, os, sys
address, _, digest = sys.argv[1].partition("#sha256=")
bucket, _, key = address.removeprefix("s3://").partition("/")
os.makedirs(sys.argv[2], exist_ok=True)
path = os.path.join(sys.argv[2], os.path.basename(key))
boto3.client("s3").download_file(bucket, key, path)
with open(path, "rb") as file:
    found = hashlib.sha256(file.read()).hexdigest()
if digest and found != digest:
    os.remove(path)
    sys.exit(f"{address} is not what the driver put there: its sha256 is {found}, not {digest}; run again")' "$1" "$2"
}

make_venv() {
    export UV_CACHE_DIR="$DIR/cache" UV_PYTHON_INSTALL_DIR="$DIR/python" UV_HTTP_RETRIES=10
    export PATH="$DIR/uv/bin:$PATH"
    # The user's index is the only one: where packages of the same name are elsewhere, they must not come in.
    [[ -z "$INDEX_URL" ]] || export UV_DEFAULT_INDEX="$INDEX_URL" PIP_INDEX_URL="$INDEX_URL"
    find_uv
    say "making an environment with Python $PYTHON_VERSION"
    uv venv --quiet --seed --clear --python "$PYTHON_VERSION" "$DIR/venv"
    export VIRTUAL_ENV="$DIR/venv" PATH="$DIR/venv/bin:$PATH"
    cd "$DIR"
    local address versions=()
    [[ ${#WHEELS[@]} == 0 && "$CONSTRAINTS" != s3://* ]] || uv pip install --quiet boto3
    for address in "${WHEELS[@]}"; do
        say "fetching $address"
        fetch "$address" wheels
    done
    # Of every package the driver's version, so that no two instances of a run differ.
    if [[ "$CONSTRAINTS" == s3://* ]]; then
        say "fetching $CONSTRAINTS"
        fetch "$CONSTRAINTS" constraints
        versions=(--constraint constraints/*.txt)
    elif [[ -n "$CONSTRAINTS" ]]; then
        base64 --decode <<< "$CONSTRAINTS" | gzip --decompress > constraints.txt
        versions=(--constraint constraints.txt)
    fi
    # PyTorch's own index has the build for this machine's driver, and a small one for none; PyPI's will do.
    if [[ -z "$INDEX_URL" ]] && curl --head --silent --fail --max-time 10 https://download.pytorch.org/whl/torch/ > /dev/null; then
        export UV_TORCH_BACKEND=auto
    fi
    say "installing ${REQUIREMENTS[*]}"
    uv pip install --quiet "${versions[@]}" "${REQUIREMENTS[@]}"
}

run_setup() {
    local command folder="${RUBBERBAND_ROOT:-}/etc/apt/apt.conf.d"
    # What a machine installs by itself when it boots holds apt's lock for some minutes: wait for it.
    [[ ! -d "$folder" ]] || echo 'DPkg::Lock::Timeout "600";' > "$folder/99rubberband-lock"
    for command in "${SETUP[@]}"; do
        say "setup: $command"
        /bin/bash -c "$command"
    done
}
