BEGIN TRANSACTION;
CREATE TABLE closings (
    run text, round integer, exchange integer, cid text, primary key (run, round, exchange, cid)) without rowid;
INSERT INTO "closings" VALUES('d0b8c719e95f77d1',1,0,'d00');
INSERT INTO "closings" VALUES('d0b8c719e95f77d1',1,0,'d01');
INSERT INTO "closings" VALUES('d0b8c719e95f77d1',1,0,'d02');
INSERT INTO "closings" VALUES('d0b8c719e95f77d1',1,0,'d03');
INSERT INTO "closings" VALUES('d0b8c719e95f77d1',1,1,'d00');
INSERT INTO "closings" VALUES('d0b8c719e95f77d1',1,1,'d01');
INSERT INTO "closings" VALUES('d0b8c719e95f77d1',1,1,'d02');
INSERT INTO "closings" VALUES('d0b8c719e95f77d1',1,1,'d03');
CREATE TABLE devices (cid text primary key, n integer not null, engine text not null) without rowid;
INSERT INTO "devices" VALUES('d00',40,'onnx');
INSERT INTO "devices" VALUES('d01',41,'onnx');
INSERT INTO "devices" VALUES('d02',42,'onnx');
INSERT INTO "devices" VALUES('d03',43,'onnx');
CREATE TABLE events (id integer primary key, line text not null);
INSERT INTO "events" VALUES(1,'{"event":"start","epoch":1,"federation":"test","unix_ms":1700000001000}');
INSERT INTO "events" VALUES(2,'{"event":"program","model":"softmax","parity":{"onnx":null},"seconds":0.0}');
INSERT INTO "events" VALUES(3,'{"event":"joined","device":"d00","engine":"onnx","n":40}');
INSERT INTO "events" VALUES(4,'{"event":"joined","device":"d01","engine":"onnx","n":41}');
INSERT INTO "events" VALUES(5,'{"event":"joined","device":"d02","engine":"onnx","n":42}');
INSERT INTO "events" VALUES(6,'{"event":"joined","device":"d03","engine":"onnx","n":43}');
INSERT INTO "events" VALUES(7,'{"event":"round","run":"fesem","method":"fesem","round":1,"of":2,"accuracy":{"micro":0.975,"macro":0.9750000000000001},"f1":{"micro":0.9725274725274724,"macro":0.9725274725274726},"per_device":{"d00":1.0,"d01":1.0,"d02":0.95,"d03":0.95},"per_center":[0.975,0.975],"assignment":{"d00":0,"d01":1,"d02":0,"d03":1},"bytes":{"down":15713,"up":10332},"seconds":0.0}');
CREATE TABLE exchanges (
    run text, round integer, exchange integer, left_ms integer not null, closed integer not null default 0,
    primary key (run, round, exchange)) without rowid;
INSERT INTO "exchanges" VALUES('d0b8c719e95f77d1',1,0,300000,1);
INSERT INTO "exchanges" VALUES('d0b8c719e95f77d1',1,1,300000,1);
INSERT INTO "exchanges" VALUES('d0b8c719e95f77d1',2,0,300000,0);
CREATE TABLE late (
    run text, round integer, exchange integer, cid text, sha256 text not null, size integer not null,
    n integer not null, what text not null, base text not null, seconds real not null, shown integer not null default 0,
    primary key (run, round, exchange, cid)) without rowid;
CREATE TABLE meta (key text primary key, value text not null) without rowid;
INSERT INTO "meta" VALUES('epoch','1');
INSERT INTO "meta" VALUES('lesson','{"codec": "f32", "federation": "test", "model": {"batch-size": 8, "engines": ["onnx"], "name": "softmax"}, "runs": [{"batch-size": 8, "clusters": 2, "local-steps": 3, "method": "fesem", "name": "fesem", "restarts": 3, "rounds": 2}], "seed": 3}');
INSERT INTO "meta" VALUES('program','{"program": "2929ac30fd8fb164afcb3277f7b86e9dcc53e4373d06540bbaec980374649eaf", "initial": "24b8958878c3c69fbb9cdfc6da3f7ba524807474f2b25b078d680d9b0c5521bc"}');
INSERT INTO "meta" VALUES('scales/d0b8c719e95f77d1','{"delta": 0.15527354150943634}');
INSERT INTO "meta" VALUES('schema','2');
CREATE TABLE refusals (
    run text, round integer, exchange integer, cid text, reason text not null,
    primary key (run, round, exchange, cid)) without rowid;
CREATE TABLE replies (
    run text, round integer, exchange integer, cid text, sha256 text not null, size integer not null,
    n integer not null, what text not null, base text not null, seconds real not null,
    primary key (run, round, exchange, cid)) without rowid;
INSERT INTO "replies" VALUES('d0b8c719e95f77d1',1,0,'d00','c91dadc91d8a37bcc03180aecb03f92fdcb652a002cb610ee365007a14e790fb',464,40,'delta','20711212f5c3523dd7c723330ee0c94d0c8b259d03a0deae6bd420c002e9e340',0.0);
INSERT INTO "replies" VALUES('d0b8c719e95f77d1',1,0,'d01','427d94141ed0c0dd477577d19692fa5c2368e230c20fa43002da8e48c66282a0',464,41,'delta','20711212f5c3523dd7c723330ee0c94d0c8b259d03a0deae6bd420c002e9e340',0.0);
INSERT INTO "replies" VALUES('d0b8c719e95f77d1',1,0,'d02','d452744ccbba1c475192f074492dae69c9c0977caefd597d8e454430a3fe8ac5',464,42,'delta','20711212f5c3523dd7c723330ee0c94d0c8b259d03a0deae6bd420c002e9e340',0.0);
INSERT INTO "replies" VALUES('d0b8c719e95f77d1',1,0,'d03','eb1fafdc74182d5040655c84af404f5364137222c10bcddb75d3f747fdba2b0f',464,43,'delta','20711212f5c3523dd7c723330ee0c94d0c8b259d03a0deae6bd420c002e9e340',0.0);
INSERT INTO "replies" VALUES('d0b8c719e95f77d1',1,1,'d00','4eba3a8bdc3519a1171264b1f37fed81c89944221c056e9b23a450b87834ccaf',360,20,'stats','',0.0);
INSERT INTO "replies" VALUES('d0b8c719e95f77d1',1,1,'d01','446969435437c2e99738302791c7e4a78e418ef51bfcf965031f9e290f933d46',360,20,'stats','',0.0);
INSERT INTO "replies" VALUES('d0b8c719e95f77d1',1,1,'d02','cbb2fea406b25b8f1e7e8f7a669b0abf3da0c44ced8b93c7c50d0f4ce4a4b87d',360,20,'stats','',0.0);
INSERT INTO "replies" VALUES('d0b8c719e95f77d1',1,1,'d03','cac8aff9461162dea974a499c513b82e635b34af5ccb2107e8dc735d54ffa32e',360,20,'stats','',0.0);
INSERT INTO "replies" VALUES('d0b8c719e95f77d1',2,0,'d00','8c9db382c19991213e332b93fc88b37466bd9709f171f64b93b49aca12ea0e1f',464,40,'delta','1319e6219d5c8602764163105d54901cfb23e9ec63f484a85fa5adbc5c671aae',0.0);
INSERT INTO "replies" VALUES('d0b8c719e95f77d1',2,0,'d01','a32ee93a9203f7c4933a88ce4cfa5b9c66f94bc8b161670d713dbd1a4f28ba44',464,41,'delta','de3d577e4444a6707834b6b373c2058ae3d9ab28bf01f1f5a28f8ec5f7f708e8',0.0);
INSERT INTO "replies" VALUES('d0b8c719e95f77d1',2,0,'d02','13a9cda94a476f65cf9618e1ad14dec231c570ae22c621a406a1aa728a58095d',464,42,'delta','1319e6219d5c8602764163105d54901cfb23e9ec63f484a85fa5adbc5c671aae',0.0);
CREATE TABLE runs (name text primary key, run text not null unique) without rowid;
INSERT INTO "runs" VALUES('fesem','d0b8c719e95f77d1');
CREATE TABLE states (run text, round integer, blob text not null, primary key (run, round)) without rowid;
INSERT INTO "states" VALUES('d0b8c719e95f77d1',0,'86a2d943ebf8ea434e5a00732d4a1efd9cd55fd75373b963af13b67736d6634b');
INSERT INTO "states" VALUES('d0b8c719e95f77d1',1,'20ec3153e1d963acba184e814dd40607bc090bc14fbe0e37c2c2f339b78c4887');
CREATE TABLE tasks (
    run text, round integer, exchange integer, cid text, sha256 text not null,
    primary key (run, round, exchange, cid)) without rowid;
INSERT INTO "tasks" VALUES('d0b8c719e95f77d1',1,0,'d00','bfcd409a6c4edb274e7f08c91987d4a4324325264f588ec1ee071d0e60627c70');
INSERT INTO "tasks" VALUES('d0b8c719e95f77d1',1,0,'d01','3c484a8d5a1506073a62c3a7ef74841763851f6d8e0adbeb8bc1abc6e133020e');
INSERT INTO "tasks" VALUES('d0b8c719e95f77d1',1,0,'d02','a9c41f8f5a257356803517a8bf1754c102e4578da382831e243f8f8f228ec150');
INSERT INTO "tasks" VALUES('d0b8c719e95f77d1',1,0,'d03','6a4ef73f2dcf418fce53186155480bf6c0e57a4a960650a8ed2ecd471dbe5461');
INSERT INTO "tasks" VALUES('d0b8c719e95f77d1',1,1,'d00','fbac093132eeeba68d47ef0953b1b9dae4b50460a2b72b8e016d99e2958382d9');
INSERT INTO "tasks" VALUES('d0b8c719e95f77d1',1,1,'d01','05632c60356983f3f5ab2cdb263af71eac7b457a587b1126808e75bc1b57500c');
INSERT INTO "tasks" VALUES('d0b8c719e95f77d1',1,1,'d02','fbac093132eeeba68d47ef0953b1b9dae4b50460a2b72b8e016d99e2958382d9');
INSERT INTO "tasks" VALUES('d0b8c719e95f77d1',1,1,'d03','05632c60356983f3f5ab2cdb263af71eac7b457a587b1126808e75bc1b57500c');
INSERT INTO "tasks" VALUES('d0b8c719e95f77d1',2,0,'d00','bfdcd11208196d7b8ab1504317aabbc9fb09219bbc27c845b581b4ec78a6943d');
INSERT INTO "tasks" VALUES('d0b8c719e95f77d1',2,0,'d01','d64dbc4cc739b52fdc21ba25da72cc639f240450b74eacf6241cca2624eff474');
INSERT INTO "tasks" VALUES('d0b8c719e95f77d1',2,0,'d02','eae250928ca7f50d7ce015bb577779f86ff658489bea66ccbfddc86abd0c4773');
INSERT INTO "tasks" VALUES('d0b8c719e95f77d1',2,0,'d03','859fabe3ca2beab1debd75d6ff615889c83c44c3cc1b881ad0717fb8e9a5702b');
COMMIT;
