package main

// Topics, manifests, blocks, bitmaps and signatures: sections 2, 4 and 5.

import (
	"bytes"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash/crc32"
	"regexp"
	"strings"
)

const blockHeader = 16

var (
	isSha, isKey, isSig = regexp.MustCompile(`^[0-9a-f]{64}$`), regexp.MustCompile(`^[0-9a-f]{16}$`), regexp.MustCompile(`^[0-9a-f]{128}$`)
	isRun, isID         = regexp.MustCompile(`^[a-z0-9]{1,16}$`), regexp.MustCompile(`^[A-Za-z0-9-]{1,36}$`)
	isCid, isSlot       = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`), regexp.MustCompile(`^[a-z0-9-]{1,32}$`)
	isTopic             = regexp.MustCompile(strings.NewReplacer("CID", `[A-Za-z0-9_-]{1,64}`, "LABEL", `[0-9a-f]{16}`, "NUMBER", `(?:0|[1-9][0-9]{0,4})`).Replace(
		`^fc/v1/[a-z0-9-]{1,32}/(?:bc/(?:coord|cat)|(?:st|rq)/CID|dn/CID/t|(?:in/NUMBER/CID|dn/CID/b)/LABEL/(NUMBER))$`))
	// what a blob of a kind may have at most (section 14)
	largest = map[string]int64{"program": 1 << 20, "catalog": 1 << 20, "container": 256 << 20, "release": 64 << 20, "sum": 64 << 10, "points": 1 << 30, "router": 8 << 20,
		"model": 4 << 30, "linear": 4 << 30, "delta": 4 << 30, "stats": 4 << 30, "frozen": 4 << 30, "sketch": 4 << 30, "masked": 4 << 30}
)

func checkTopic(topic string) {
	parts := isTopic.FindStringSubmatch(topic)
	need(parts != nil && !(len(parts[1]) == 5 && parts[1] > "65535"), "bad_field", "topic %q", topic)
}

func sha256Of(data []byte) string { sum := sha256.Sum256(data); return hex.EncodeToString(sum[:]) }

func readBase64(text any) []byte {
	coded, ok := text.(string)
	data, err := base64.StdEncoding.DecodeString(coded)
	need(ok && err == nil && base64.StdEncoding.EncodeToString(data) == coded, "bad_field", "base64 in another form than the canonical one")
	return data
}

func toBase64(data []byte) string { return base64.StdEncoding.EncodeToString(data) }

type manifest struct {
	sha, kind, key, sig string
	size, block         int64
	inline              []byte
}

func readManifest(value any, kinds ...string) (m manifest) {
	fields, ok := value.(object)
	need(ok, "bad_field", "a manifest is an object")
	m.sha, _ = fields["sha256"].(string)
	m.kind, _ = fields["kind"].(string)
	size, isInt := fields["size"].(int64)
	block, isBlock := fields["block"].(int64)
	m.size, m.block = size, block
	need(isSha.MatchString(m.sha) && isInt && size >= 1, "bad_field", "sha256 or size of a manifest")
	limit, known := largest[m.kind]
	need(known && (len(kinds) == 0 || contains(kinds, m.kind)), "bad_field", "kind %q of a manifest", m.kind)
	need(isBlock && block >= 4096 && block <= 1<<20 && block%4096 == 0, "bad_field", "block of a manifest")
	need(size <= limit, "too_big", "%s of %d bytes", m.kind, size)
	need(m.total() <= 65536, "bad_field", "a blob of %d blocks", m.total())
	if coded, there := fields["inline"]; there {
		m.inline = readBase64(coded)
		need(len(m.inline) <= 2048, "too_big", "an inline blob of %d bytes", len(m.inline))
		need(int64(len(m.inline)) == size && sha256Of(m.inline) == m.sha, "bad_hash", "an inline blob is another one")
	}
	key, hasKey := fields["key"]
	sig, hasSig := fields["sig"]
	m.key, _ = key.(string)
	m.sig, _ = sig.(string)
	need(hasKey == hasSig && (hasKey || m.kind != "program"), "bad_signature", "a manifest of kind %s without a signature", m.kind)
	need(!hasKey || isKey.MatchString(m.key) && isSig.MatchString(m.sig), "bad_signature", "key or sig of a manifest")
	return
}

func (m manifest) total() int64 { return (m.size + m.block - 1) / m.block }

func (m manifest) bytesOf(index int64) int64 {
	if index == m.total()-1 {
		return m.size - index*m.block
	}
	return m.block
}

func (m manifest) json() object {
	out := object{"sha256": m.sha, "size": m.size, "block": m.block, "kind": m.kind}
	if m.inline != nil {
		out["inline"] = toBase64(m.inline)
	}
	return out
}

func newManifest(kind string, data []byte, block int64) manifest {
	m := manifest{sha: sha256Of(data), size: int64(len(data)), block: block, kind: kind}
	if len(data) <= 2048 {
		m.inline = data
	}
	return m
}

func writeBlock(index, total int64, mark uint16, data []byte) []byte {
	out := make([]byte, blockHeader, blockHeader+len(data))
	out[0] = 1
	binary.LittleEndian.PutUint16(out[2:], mark)
	binary.LittleEndian.PutUint32(out[4:], uint32(index))
	binary.LittleEndian.PutUint32(out[8:], uint32(total))
	binary.LittleEndian.PutUint32(out[12:], crc32.Update(crc32.ChecksumIEEE(out[:12]), crc32.IEEETable, data))
	return append(out, data...)
}

// readBlock returns the data of block `index`, the topic's, of a blob, and the mark that an answer to `get` carries.
func readBlock(m manifest, index int64, payload []byte, answer bool) ([]byte, uint16) {
	need(len(payload) > blockHeader, "bad_field", "a block without data")
	need(payload[0] == 1, "bad_version", "block version %d", payload[0])
	mark := binary.LittleEndian.Uint16(payload[2:])
	need(payload[1] == 0 && (answer || mark == 0), "bad_field", "flags of a block")
	need(int64(binary.LittleEndian.Uint32(payload[4:])) == index && index < m.total(), "bad_range", "index of a block")
	need(int64(binary.LittleEndian.Uint32(payload[8:])) == m.total(), "bad_range", "total of a block")
	data := payload[blockHeader:]
	need(int64(len(data)) == m.bytesOf(index), "bad_field", "length of a block")
	sum := crc32.Update(crc32.ChecksumIEEE(payload[:12]), crc32.IEEETable, data)
	need(binary.LittleEndian.Uint32(payload[12:]) == sum, "bad_hash", "checksum of a block")
	return data, mark
}

func readBitmap(text any, total int64) []byte {
	bitmap := readBase64(text)
	need(int64(len(bitmap)) == (total+7)/8 && len(bitmap) <= 4096, "bad_field", "length of a bitmap")
	need(total%8 == 0 || bitmap[len(bitmap)-1]>>(total%8) == 0, "bad_field", "spare bits of a bitmap")
	return bitmap
}

func holds(bitmap []byte, index int64) bool {
	return bitmap != nil && bitmap[index/8]>>(index%8)&1 == 1
}

type keyring map[string]ed25519.PublicKey // by key id

func newKeyring(keys []string) keyring {
	ring := keyring{}
	for _, text := range keys {
		raw, err := hex.DecodeString(text)
		if err != nil || len(raw) != ed25519.PublicKeySize {
			panic("a signing key has 64 hex digits")
		}
		ring[sha256Of(raw)[:16]] = raw
	}
	return ring
}

func (ring keyring) verify(federation, kind, sha string, size int64, key, sig string) bool {
	public, known := ring[key]
	raw, err := hex.DecodeString(sig)
	text := fmt.Sprintf("fedcenters/v1/blob\n%s\n%s\n%s\n%d\n", federation, kind, sha, size)
	return known && err == nil && ed25519.Verify(public, []byte(text), raw)
}

func (ring keyring) check(federation string, m manifest) {
	need(ring.verify(federation, m.kind, m.sha, m.size, m.key, m.sig), "bad_signature", "%s %s", m.kind, m.sha[:16])
}

func contains(list []string, one string) bool {
	for _, other := range list {
		if one == other {
			return true
		}
	}
	return false
}

func equal(a, b []byte) bool { return bytes.Equal(a, b) }
